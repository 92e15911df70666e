"""Connectors that decide on the scheduler: what they promise there is pinned in host memory, and loaded by workers.

Such a connector is a `ScheduledConnector`, which vLLM creates once for its scheduler and once in every worker:

- `scheduler.SchedulerHalf` answers vLLM's scheduler, and turns its steps into `metadata.StepMetadata`,
- `worker.WorkerHalf` carries these out, and tells what became of transfers in a `metadata.WorkerReport`.
"""
