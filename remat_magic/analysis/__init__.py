"""Jaxprs in, reports out."""
