"""What is best to save within a budget."""
