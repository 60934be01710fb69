"""What proposes tokens: a module for each kind of draft, and what is known of the kind as data."""
