"""What the benchmarks share. Each file of the parent folder answers one question.

processes   started, watched and always stopped; what they use; free ports
client      HTTP requests and the metrics of a process
figures     rounds in turns, medians of ratios, tables
models      models that are trained and served, their samples and rows
training    workers, shards and brokers
learners    one learner on one stream, ours or a peer's
runner      runs the commands of a suite in turns; the command line of bench.py and quality.py
results     the file of results
suite       what bench.py measures
pages       generated from the results of bench.py, with sizing and charts
"""
