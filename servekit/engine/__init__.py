"""The engine: the step loop, the process it lives in, and the clients that talk to it."""
