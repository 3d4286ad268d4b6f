"""What XLA makes of a policy, compiled and run."""
