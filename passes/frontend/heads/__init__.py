"""Draft heads that read a target's hidden states, and its MTP modules, as modules to trace."""
