"""What caches hold of layers whose keys and values are expanded from one latent (MLA)."""

from __future__ import annotations

# latent where that takes fewer bytes and the backend computes it
AUTO = "auto"
# the latent, and the part of a key that all heads share
LATENT = "latent"
# keys and values of each head, as the model computes them
EXPANDED = "expanded"
MLA_CACHES = (AUTO, LATENT, EXPANDED)
