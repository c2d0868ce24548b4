"""In which order requests are served: `base.py` says what a policy is, each other file is one."""
