"""The server: batching at exits, gears that become cheaper under load, a watched guarantee, and HTTP protocols.

`scheduler` decides what is computed next, `governor` in which gear, `watch` how often early answers differ from those
of the full model; none of the three has a thread or a clock of its own. `worker` drives them, `app` serves HTTP.
"""
