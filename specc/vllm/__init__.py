"""Names that users of vLLM type, and what specc makes of each: options of requests, of engines and
of calls, methods, and names to import. Each is taken, ignored with a warning, or refused with the
way to the same here.
"""
