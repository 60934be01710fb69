"""Steps as captured graphs, whatever the device captures them with."""
