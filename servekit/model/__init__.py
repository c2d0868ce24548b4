"""The model: its description (spec), its mathematics (decoder), its weights, tokenizer and chat template."""
