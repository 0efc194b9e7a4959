from __future__ import annotations

import signal

# Whatever a shell starts in the background ignores SIGINT, and so does all that it starts: tests of Ctrl-C would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)
