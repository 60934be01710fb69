"""Options of commands: dataclasses of those that go together, and how they become typer's."""
