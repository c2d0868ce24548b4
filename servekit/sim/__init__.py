"""Step times of GPUs, for the capacity planner and for runs on a virtual clock."""
