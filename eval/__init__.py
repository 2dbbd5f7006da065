"""Measure what compression costs: in quality, in speed, and in the scores of tasks.

Methods and measurements
    baselines, methods   other ways to store a cache, and all methods by name
    quality, stats       the loss of a method, and its certainty
    tasks, lm            lm-eval tasks that need their context, and the lm-eval model that runs them

The commands
    demo                 `cuvee demo`
    report               `cuvee report`
    bench                benchmarks, run from a checkout: the codec on a CPU and on a GPU, vLLM, blends in vLLM
    lm_command           `cuvee eval`

Shared parts
    documents, formatting     the style of reports and numbers
    runs, progress, machine   folders of runs, progress, and the machine
"""
