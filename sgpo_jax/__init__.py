"""sGPO in JAX: reinforcement learning with verifiable rewards for a fraction of the compute."""

__version__ = "0.1.0"
