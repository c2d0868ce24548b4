"""How prompts share steps with decodes: `base.py` says what a prefill component is, each other file is one.

`alternation.py` is what those share that give prompts and decodes steps of their own.
"""
