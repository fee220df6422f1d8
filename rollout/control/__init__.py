"""What decides: lifecycle, messages, routing and the controller. Pure Python: `handle(event, now) -> commands`."""
