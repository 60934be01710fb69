"""How often the target accepts what each kind of draft proposes, measured without whole steps."""
