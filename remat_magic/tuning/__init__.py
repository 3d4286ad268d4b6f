"""From reports and measurements to a choice."""
