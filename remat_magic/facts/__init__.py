"""What a retrace says: residuals, recomputation, costs, memory over time, the text of programs."""
