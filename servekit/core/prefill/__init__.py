"""How prompts share steps with decodes: `base.py` says what a prefill component is, each other file is one."""
