"""The command line: `octavo serve | generate | chat | bench | models`."""
