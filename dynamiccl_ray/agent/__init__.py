"""The agent: what it observes, its policy, its reward, and how it reads evidence of its own and of like keys."""
