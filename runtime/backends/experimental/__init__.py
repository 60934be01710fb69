"""What runs that no GPU has shown: passes by packages of AOTInductor."""
