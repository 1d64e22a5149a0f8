"""Mixtures of experts: DeepSpeed's MoE layers and AutoEP."""
