"""From reports to a choice: estimated times, comparisons, assertions."""
