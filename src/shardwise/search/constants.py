"""The constants of the search, each with its reason. The page "How the search works" explains where they act."""

# -- exact minimisation --------------------------------------------------------------------------------------------

# Elements of a block that stays in the second-level cache of today's processors (256 KiB of float64), and fewer than
# torch gives to several threads (32,768): these wait for each other where other processes have the cores, and a joint
# table of 3.7 million combinations took 0.5 CPU seconds by blocks of 65,536 there, and 0.006 by these.
CACHE_BLOCK_ELEMENTS = 32_000
# Larger joint tables are refused: 2 billion additions take about a second.
MAX_JOINT_COMBINATIONS = 4_000_000_000
# Before larger joint tables message passing is tried, as one elimination may compute dozens: a scan of 16 steps on
# 2 x 2 devices takes 35 CPU seconds by tables of up to 991,440,000 combinations, and milliseconds by messages.
FAST_JOINT_COMBINATIONS = 100_000_000
# Bytes of all results of an elimination, which are kept until the way back.
MAX_ELIMINATION_BYTES = 2**30
# Joint tables of the eliminations that come before message passing: the results are tables over two variables.
MAX_NARROW_COMBINATIONS = 50_000_000
# Sweeps of message passing, in both directions, at most; it has settled where the bound rose by less than this share of
# the gap while their number doubled.
MAX_SWEEPS = 127
SETTLED_GAP_SHARE = 0.05
# Gap of one solve at which message passing ends: a fifth of what the multipliers leave (``BOUND_TOLERANCE``).
WIDE_GAP = 1e-4
# Tables of message passing that are not shared between equal steps.
MAX_MESSAGE_BYTES = 2**28
# Price of a forbidden combination in message passing, in times all that others can differ by.
FORBIDDEN_FACTOR = 4.0
# Joint table of a conditioned search, solved in milliseconds; there may be hundreds.
MAX_CONDITIONED_COMBINATIONS = 2_000_000
CONDITIONING_ROUNDS = 3

# -- the objective and its bound -----------------------------------------------------------------------------------

# Seconds per byte that break ties between choices of equal time: 80 GB weigh less than a picosecond.
BYTE_TIE_BREAK = 1e-23
# Weight of what is hidden (traffic behind compute, or the reverse): it moves no bound beyond EXACT_GAP.
HIDDEN_WEIGHT = 1e-9
# Solves of one search for its multipliers, and the highest price of all bytes of the limit, in steps.
MAX_SOLVES = 40
MAX_BYTE_PRICE = 1e6
# The bound over multipliers is settled when it can rise by no more than this share.
BOUND_TOLERANCE = 5e-4
# Variables that are fixed one at a time to come closer to the bound, only where a solve is cheap.
MAX_BRANCHES = 3
MAX_BRANCHING_COMBINATIONS = 2_000_000
# Smaller gaps are rounding.
EXACT_GAP = 1e-9
# Caps on transient bytes that are tried, and how many of these searches become programs.
NUM_TRANSIENT_CAPS = 6
MAX_CAP_PROGRAMS = 3
# Searches under a lower limit where the program of a plan holds more than its price said; halvings back once one fits.
MAX_LIMIT_RETRIES = 3
MAX_LIMIT_HALVINGS = 3

# Bytes of full messages, prefetch depths and chunks of rows that are tried beside the usual ones; the share of a step
# that another has to save.
BUCKET_SIZES = (8 * 2**20, 100 * 2**20, 500 * 2**20, 2**31)
PREFETCH_DEPTHS = (2, 4)
ROW_CHUNKS = (2, 4)
BUCKET_GAIN = 0.005

# -- prices --------------------------------------------------------------------------------------------------------

# Forward has one part in so many of the seconds of a lowered operator: backward has one per operand of two.
LOWERED_FORWARD_PARTS = 3
# Elements, or products, from which an operator that depends on no parameter gets a choice: about 10 us on an H100.
HEAVY_INPUT_WORK = 2**22
# Traffic of a gathered parameter whose gather is repeated: gather and reduction send equally much.
REGATHER_TRAFFIC = 1.5
RESEND_TRAFFIC = REGATHER_TRAFFIC - 1
# A message is sent again if that saves more than the largest message brings, divided by this.
MIN_RESEND_SAVING = 64

# -- candidates that are simulated ---------------------------------------------------------------------------------

# Assignments of a higher additive price than this times the least are not simulated.
CANDIDATE_PRICE_RATIO = 1.05
# The same with recomputation, repeated gathers or offload, whose prices know less of what hides them: steps of a block
# of Llama-3-405B were simulated at 0.95 to 1.25 times their prices, and the fastest had 1.06 to 1.2 times the least
# price.
CANDIDATE_PRICE_RATIO_RECOMPUTED = 1.2
MAX_CANDIDATES_PER_MESH = 5
MAX_CANDIDATES = 8
# Operators in all programs that are built for one mesh: about ten seconds. Larger models are not simulated.
MAX_SIMULATED_OPERATORS = 12_000
# Variables in all assignments that ``k_best`` lists for one mesh: some tenths of a second.
MAX_LISTED_VARIABLES = 16_000
NUM_LISTED_ASSIGNMENTS = 8
# Larger models are not searched greedily: in 24 rankings of Llama, Mixtral and stages of DeepSeek-V3 (281 operators and
# more) no greedy plan was among the candidates, and the search took a sixth of the time.
MAX_OPERATORS_FOR_GREEDY = 190
# Larger models are not compared with data parallelism, nor tried between limits: it takes longer than the exact search.
MAX_OPERATORS_TO_COMPARE = 1_000
# A simulated step must be faster than that of a cheaper candidate by this factor to be preferred.
CLEARLY_FASTER = 0.999
# Candidates whose seconds and bytes are up to this times those of the fastest tie with it, and the plainest is taken: a
# sixth of the narrowest interval of a bundled cluster (12 %, h100). Whole states are thus no tie of sharded ones.
TIED_SHARE = 1.02
# Multiples of k assignments of least bound that are looked at until the k best steps are proven to be among them.
TOP_K_WIDENING = (1, 8, 64)

# -- memory policies -----------------------------------------------------------------------------------------------

# A search for a better plan than a known one ends at this multiple of its step (steps were 0.95 to 1.25 of prices).
PRICE_CUTOFF = 1 / 0.9
# Policies whose simulated steps tell how far prices of this model are off. With fewer, one model's policies of about
# equal price were simulated at 1.35, 1.16 and 1.03 times it.
MIN_POLICIES_FOR_RATIO = 3
# Steps from programs of few blocks are within this of those of whole programs (``search.block_extrapolation``).
FOLDED_STEP_ERROR = 1.01
# A price above this times the bound without a limit is due to the limit.
BINDING_LIMIT = 1.01
# Where a policy's additive bytes are above this times the limit, its programs are not built: they hold more than that.
CLEARLY_OVER_LIMIT = 1.1
# Runs of fewer equal blocks, and smaller models, are simulated whole.
MIN_REPEATED_BLOCKS = 4
MIN_OPERATORS_TO_FOLD = 400
# Searches under a memory limit mix choices, such as one layer that keeps less behind three that keep more.
LONGEST_FOLDED_PERIOD = 4
# Operators of all short programs together that are not known yet, as a share of the model's.
MAX_FOLDED_SHARE = 1.0

# -- stages --------------------------------------------------------------------------------------------------------

# Positions of a cut that are considered.
MAX_CUT_POSITIONS = 400
# A slowest stage that is slower than the best by this factor is taken if fewer bytes cross.
SLOWEST_STAGE_SLACK = 1.03
# Seconds that a stage over the memory limit counts as.
OVER_LIMIT_PENALTY = 1e6
# Forward is a third of a step without recomputation: so much longer is a stage that recomputes everything.
RECOMPUTED_SHARE = 1 / 3
# A cut is planned if it may be better than the best planned one by more than this share.
PARTITION_TOLERANCE = 0.01
# Cuts of one micro-batch size that are planned at most until one fits, and once one fits.
MAX_PLANNED_CUTS = 60
MAX_FASTER_CUTS = 4
# Memory policies whose programs are built to find the least memory of a stage: those of the fewest additive bytes.
NUM_LEAST_POLICIES = 3
# Plans of stages that are tried until boundary values fit as well.
MAX_BOUNDARY_TRIES = 3
# Blocks by which ``plan.top`` moves a cut.
MAX_CUT_MOVES = 3
# Share of a device's memory for what adds up in estimates; the rest is for transient bytes.
ESTIMATED_MEMORY_SHARE = 0.93
# Weights of traffic in estimates (compute has the rest), and prices of all bytes of a device, in steps.
ESTIMATED_TRAFFIC_WEIGHTS = (HIDDEN_WEIGHT, 0.5)
ESTIMATED_BYTE_PRICES = (0.03, 0.3, 3.0, 30.0)
# Settings of ``stages="auto"`` that are planned at most; of large models fewer, so that they have this many operators.
MAX_PLANNED_SETTINGS = 24
MAX_PLANNED_OPERATORS = 12_000
# Pairs of a number of pipeline ranks and a micro-batch that are estimated by searches.
MAX_REFINED_ESTIMATES = 32
# A step without bubbles takes about this times the seconds of all products at the peak.
ROUGH_STEP_FACTOR = 1.5
# An estimate from searches for another number of pipeline ranks or samples counts as this share of its value.
SCALED_ESTIMATE_SHARE = 0.9
# Share of the time until a deadline after which the best setting so far is planned, whatever else could be estimated.
ESTIMATING_SHARE = 0.5

# -- solved pipeline orders ----------------------------------------------------------------------------------------

# Actions that are placed while orders are tried: about a second; and orders at most.
MAX_ORDER_ACTIONS = 300_000
MAX_ORDER_TRIES = 2_000
# Differences of a step below this share are rounding.
ORDER_ROUNDING = 1e-9
# An order that holds more memory than the known ones must be faster by this factor.
ORDER_WORTH_MEMORY = 0.995
