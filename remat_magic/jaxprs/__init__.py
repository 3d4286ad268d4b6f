"""Jaxprs walked, followed and written anew."""
