"""The parameter server: processes that hold the weights, decide which pushes update them, and apply
the updates.

A server process holds one shard: a part of all weights, of the optimizer's state and of the rows of
tables. The process of shard 0 also runs the gate, which decides for all shards which pushes make
which version. The path of one push, with the file of each step:

    trainer
      │ GRADIENTS, PUSH                       to every shard
      ▼
    sessions.py    a thread per trainer reads the frame; the gradients go into the trainer's seat
      │            (seats.py), and the shard notes that they are staged (shard.py)
      ▼
    service.py     shard 0 passes the push on to the gate, the others send STAGED (gate_link.py)
      ▼
    dispatch.py    at shard 0: once every shard has staged the push, ask the gate
      ▼
    gate.py        pure decision (rules in policy.py, books in accounting.py): which pushes make the
      │            next version, and whose answers may go out
      ▼
    decisions.py   rounds and answers become numbered entries
      ▼
    dispatch.py    the twin gets the entries first (replication.py), then every shard by the log
      │ ENTRY
      ▼
    shard.py       every shard carries out the entries in the same order
      ▼
    weights.py     Σ gradients and one fused optimizer kernel, chunk by chunk
      ▼
    seats.py       finished chunks go back while the next one is computed
      │ WEIGHTS, OUTCOME (from shard 0), GIVEN (from the others)
      ▼
    trainer

Start with process.py for the threads of a process, or with gate.py for the rules.
docs/parameter-server-protocol.md shows the messages.
"""
