"""What `servekit tune --help` says. It imports nothing, since help must appear at once."""

TEXT = """\
FILE.yaml says what is promised and what may be changed for it; a bare name, as in servekit tune chat, is one of those
that come with servekit: batch, chat, code, rag, smooth (conf/slo/).

  slo:                                  what must hold, all of it, each for a share of the requests
    ttft: {p99: 2s}                     time to the first token; p50 to p99.9; us, ms, s or min
    tpot: {p50: 80ms, p99: 150ms}       time per token after the first
    itl: {p99: 500ms}                   longest gap between two tokens of a request
    e2e: {p95: 20s}                     the whole request
    goodput: {share: 95%, ttft: 2s, tpot: 150ms}
                                        a share of the requests that keep several limits at once
  workload:                             what is asked, as for servekit bench
    name: chat                          or trace: FILE.csv or FILE.jsonl; other keys are those of the workload
    rate: auto                          or the requests per second to begin with
    arrival: poisson                    or gamma, fixed, or a mapping such as {kind: gamma, gap_cv: 2}
  base:                                 where the search starts, as for servekit serve
    preset: interactive
    model: smollm2-135m
    scheduler.max_num_seqs: 64
  search: default                       what decides how much load is held; all: everything that speed depends on; or
                                        knobs of your own:
    scheduler/policy: choice(fifo, sjf)
    scheduler.max_num_seqs: range(16, 129, 16)
    scheduler.prefill.chunk_tokens: tag(log, interval(32, 1024))
  budget:
    minutes: 20                         for everything: search, confirmation, memory attack
    trials: null                        at most so many
    requests: 100                       of one run of a trial
    confirm_requests: 400               of one run of the confirmation
    confirm_share: 0.4                  of the minutes, kept for the confirmation
    min_run_s: 10                       a run is at least so long: at a high rate it has more requests
    warmup_requests: 5                  at the start of a run, not judged
    timeout_s: 120                      for one request
    max_busy_share: 0.1                 of the machine that others may use before a run counts as disturbed, or null
    max_slowdown: 1.25                  of equal steps in the course of a run, or null
  study:
    sampler: tpe                        or gp, random, qmc
    seed: 0
    name: tune
    storage: null                       or the URL of a database that several machines share
    trial_timeout_s: 3600               after which another machine takes a trial for lost
  compare: [rule_of_thumb, random]      whom to measure beside the default in the end; nobody, if left out. random:
                                        the best of a random search, which takes as long again as the search did; the
                                        confirmation may then take half as long again
  folder: tuning                        where everything is kept; the same command goes on with what is there

Another server, which takes its knobs as flags or from a file, instead of servekit's own engine (base is left aside):

  target: openai
  url: http://127.0.0.1:8080            where it answers
  start_command: llama-server -m model.gguf --port 8080
                                        without knobs; every trial starts it anew
  search: llama-server                  or vllm (conf/target/), a file like these, or your own:
    slots: {values: "choice(1, 4, 16)", flag: "--parallel {value}"}
  launch:
    model: null                         the name to ask for, or the first that it lists
    start_timeout_s: 600                until it is ready

Words after the file are the same keys, dotted: budget.minutes=5 slo.ttft.p99=1s base.scheduler.max_num_seqs=64

exit status: 0 confirmed, 2 a setting that cannot be honoured, 3 the engine does not start or the machine is too busy,
             4 nothing holds the objective, 130 interrupted"""
