"""Profile-guided speculation: measure acceptance and seconds, choose plans, keep them."""
