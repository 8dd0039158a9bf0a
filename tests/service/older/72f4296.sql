BEGIN TRANSACTION;
CREATE TABLE checkpoints (
	run_id TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	name TEXT NOT NULL, 
	owner TEXT NOT NULL, 
	folder TEXT NOT NULL, 
	created DOUBLE NOT NULL, 
	expires DOUBLE, 
	size_bytes BIGINT NOT NULL, 
	public BOOLEAN NOT NULL, 
	metadata TEXT NOT NULL, 
	lora TEXT NOT NULL, 
	base_model TEXT NOT NULL, 
	step BIGINT NOT NULL, 
	version BIGINT NOT NULL, 
	PRIMARY KEY (run_id, kind, name)
);
INSERT INTO "checkpoints" VALUES('s:train:0','training','final','alice','folder',1.0,9.0,1099511627776,1,'{}','{"rank":8,"alpha":32.0,"seed":1099511627776,"train_attn":true,"train_mlp":false}','org/model',7,2);
CREATE TABLE futures (
	request_id TEXT NOT NULL, 
	owner TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	created DOUBLE NOT NULL, 
	finished DOUBLE NOT NULL, 
	content_type TEXT NOT NULL, 
	segment BIGINT NOT NULL, 
	start BIGINT NOT NULL, 
	length BIGINT NOT NULL, 
	PRIMARY KEY (request_id)
);
INSERT INTO "futures" VALUES('s:sample:0:1','alice','Sample',1.0,2.0,'application/x-protobuf',1,8589934592,4294967296);
CREATE TABLE models (
	id TEXT NOT NULL, 
	session_id TEXT NOT NULL, 
	owner TEXT NOT NULL, 
	created DOUBLE NOT NULL, 
	last_request DOUBLE NOT NULL, 
	base_model TEXT NOT NULL, 
	lora TEXT NOT NULL, 
	metadata TEXT NOT NULL, 
	step BIGINT NOT NULL, 
	state_folder TEXT NOT NULL, 
	last_seq BIGINT NOT NULL, 
	next_version BIGINT NOT NULL, 
	ended BOOLEAN NOT NULL, 
	dirty BOOLEAN NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "models" VALUES('s:train:0','s','alice',1.0,2.0,'org/model','{"rank":8,"alpha":32.0,"seed":1099511627776,"train_attn":true,"train_mlp":false}','{"k":"v"}',3,'f',4611686018427387904,4,0,1);
CREATE TABLE samplers (
	id TEXT NOT NULL, 
	session_id TEXT NOT NULL, 
	owner TEXT NOT NULL, 
	base_model TEXT NOT NULL, 
	path TEXT NOT NULL, 
	run_id TEXT NOT NULL, 
	version BIGINT NOT NULL, 
	folder TEXT NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	created DOUBLE NOT NULL, 
	ended BOOLEAN NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "samplers" VALUES('s:sample:0','s','alice','org/model','tinker://x','r',3,'g',0,5.0,1);
CREATE TABLE schema_version (
	version BIGINT NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "schema_version" VALUES(1);
CREATE TABLE sessions (
	id TEXT NOT NULL, 
	owner TEXT NOT NULL, 
	created DOUBLE NOT NULL, 
	last_seen DOUBLE NOT NULL, 
	ended DOUBLE, 
	metadata TEXT NOT NULL, 
	display_name TEXT NOT NULL, 
	tags TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "sessions" VALUES('s','alice',1.5,1.76371915012345600133e+09,NULL,'{"naïve":"\"quoted\" ✓","nul":"\u0000"}','Ω','["a","b,c"]');
CREATE INDEX ix_futures_segment ON futures (segment);
CREATE INDEX ix_futures_finished ON futures (finished);
COMMIT;
