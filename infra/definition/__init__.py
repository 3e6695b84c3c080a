"""Definition files: reads and checks them, and lays their rehearsal and scenarios over them."""
