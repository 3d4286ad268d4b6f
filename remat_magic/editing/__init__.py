"""A plan as an edit of the user's own source: where its values are made there, and the text with their names."""
