"""One module per command of `kvq`: `add(commands)` and the function it runs."""
