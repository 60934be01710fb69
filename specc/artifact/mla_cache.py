"""What caches hold of layers whose keys and values are expanded from one latent (MLA)."""

from __future__ import annotations

# latent where the backend computes it and either that takes fewer bytes or the backend knows no
# values of another width than keys; expanded where a self-draft chooses blocks and queries could
# vote over keys, and not over latents
AUTO = "auto"
# the latent, and the part of a key that all heads share
LATENT = "latent"
# keys and values of each head, as the model computes them
EXPANDED = "expanded"
MLA_CACHES = (AUTO, LATENT, EXPANDED)
