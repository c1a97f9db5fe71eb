"""Measurements on loopback endpoints. The product never imports this package.

throughput     whole runs compared with latency alone and with the engines
engines        the simplest programs that could make the same calls
call_cost      CPU per model call, compared with aiohttp and the SDKs
loop_overhead  CPU of the agent loop per turn
writing_share  CPU and bytes of writing journals and records
counts         work per turn, exported record and sandbox, compared with counts.json in CI
faulty         throughput while a few calls fail, by kind of fault
limiter        how fast a run finds an endpoint's limit
resume         start-up time and memory with a million finished records
export_speed   MB of records exported per second
reading        time of status, stats, report and verify on a large run
executors      Ray actors compared with local workers
sandboxes      CPU and memory of a sandbox
fleet          a simulation of large runs; fleet_check compares it with real ones
replicas       prompts that conversations find cached on several replicas; replica_fleet is these
soak           a long run under steady faults
peers          other agent runners on the same work; peering/ is their side
consumers      exports read by TRL, LLaMA-Factory, Axolotl, harbor; consuming/ is their side
"""
