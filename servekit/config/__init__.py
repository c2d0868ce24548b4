"""Configuration: typed, validated, resolved once."""
