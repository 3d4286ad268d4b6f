"""Reports in, something to look at out: text for terminals, HTML for notebooks. Nothing here imports jax."""
