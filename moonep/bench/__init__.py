"""Benchmarks: `moonep bench` measures, `benchmarks/` compares, summarises and plots.

routings    which router outputs are timed, by name
settings    what to measure: rows that share one Buffer
suites      lists of settings: the goals, the figures, a sweep of one's own
hosts       ranks meet, exchange values and learn of each other's failures, in bounded time
timing      samples between device events, graphs, the slowest rank
gate        outputs equal the specification, or no time is told
operations  what is timed: planning, barrier, dispatch, combine, prefetch, reduce_grad, forward, backward
weights     expert weights and gradients that can be recomputed, to compare with
ceilings    what the copy engines and the memory reach
measure     one rank's part
run         starts the ranks, keeps the time limit, collects the lines
results     lines with hardware, versions and commit; files of lines
goals       the figures to reach, and which lines measure them
peers       other libraries and hand-written code, behind one interface
exchange    rows by all_to_all_single, written by hand
comparison  what is compared side by side; that of dispatch and combine
side_by_side  MoonEP and its peers in one process group, in turn

Layers, which are comparisons, too:

layer_suite   what `--suite layers` compares
layers        one layer, forward and backward, of MoonEP and peers
layer_world   the weights, gradients and Buffer that these share
layer_peers   the layers behind one interface, and what is timed of them
layer_movers  the peers' layer: other ways to move rows, the same grouped products
layer_gate    outputs and all gradients equal each other's, and a dense layer's
products      the grouped products beside torch's
loading       a rank's own experts into the pool
layer_memory  memory over steps whose hot rank changes
transformer   training steps of a small model, with layers of transformer_layers
layer_goals   which lines measure the goals of layers
"""
