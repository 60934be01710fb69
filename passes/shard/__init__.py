"""One traced graph becomes that of a rank: which dimensions are cut, and where sums meet."""
