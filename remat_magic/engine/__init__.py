"""The primal program, its retraces, and the function handed back."""
