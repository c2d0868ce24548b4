"""The runner: executes a plan with torch. The only layer between the scheduler's integers and the model's tensors."""
