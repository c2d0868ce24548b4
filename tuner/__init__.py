"""The tuner: finds the settings that hold an objective at the highest load, on the real device, and proves it.

What is searched:

- `slo`: the objective, a set of promises, and its verdict on a finished run
- `space`, `default_space`, `grammar`: knobs, the default ones and one's own; points and the overrides that they mean
- `document`: a tuning file whose errors name their line

How a trial is judged:

- `verdict`: the same verdict while a run goes on, as early as it is certain
- `statistics`: what a finished run says about the truth, with requests that resemble each other
- `trial`: the contract between search and measurement. A `Candidate` goes in, an `Outcome` comes out, an `Executor`
  turns one into the other and never raises for what a configuration does
- `executor`: the `Executor` that searches for a rate, over a `Host`, which brings configurations up: `engine_host` for
  servekit's own engine, `server_host` for any other server. `subject`: where else these two differ

How the next one is found:

- `study`: Optuna by ask and tell: `open_study`, then `enqueue`, `ask`, `tell`, `shortlist`
- `adviser`: what the simulator predicts of a candidate, and whether it has been right so far

A search is then: while there is time, `study.tell(candidate, executor.run(candidate))` for each `study.ask()`; and its
result is what a second measurement says of the shortlist, never the best trial.
"""
