"""What the process that others are forked from does before it loads anything; nobody else imports this.

What is loaded stays, and looking through it for garbage again and again takes a second: so the collector is off until
`processes.loaded` is called in what was forked (the recipe of gc.freeze's documentation).
"""

import gc

gc.disable()
