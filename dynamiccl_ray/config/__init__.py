"""The YAML files that people write: online experiments and curricula."""
