"""Load: workloads and arrivals, a client that sends them to an endpoint, and what was measured."""
