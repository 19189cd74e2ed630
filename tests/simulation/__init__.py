"""Whole runs of real workers on a simulated Kafka under a virtual clock, each from one integer seed.

Reading guide: `clock` (time and processes), `log`, `transactions`, `groups`, `broker` (the cluster and its network), `client`,
`membership`, `leasing` (the ports on top of it), `workload` (what is published), `faults` (what goes wrong), `fold` (what must
come out), `monitor` and `checker` (whether it does), `world` (one seed), `mutations` (proof that it can fail).
"""
