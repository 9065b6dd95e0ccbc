"""Processes and the machines they run on.

How the members of a run on one machine live and end:

    supervisor ── fork ──▶ member 0 … N-1, each in its own process group
        ▲  ▲                  │     │
        │  └── JSON lines ────┘     │   what it tells, its result or its error: one pipe each
        └───── pulses ──────────────┘   step and doing, in memory they all share
    members 1 … ── text ──▶ member 0 ──▶ stderr, each line with its member's number in front

`launch` imports torch's neighbours, so import it where it is needed, not at the top of a command.
"""
