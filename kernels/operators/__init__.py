"""One module for each family of operators: schema, shapes, oracle and all that is known of it."""
