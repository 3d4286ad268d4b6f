"""The magic: from a cell to a function and its arguments, and what the cell shows."""
