"""From reports and measurements to a choice: estimated times, comparisons, assertions, measured programs."""
