"""Several products of one input, x Wᵢᵀ + bᵢ: one kernel where each alone is too small to fill the device."""
